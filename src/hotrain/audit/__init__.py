"""What a model keeps between forward and backward, measured and predicted; a report of a conversion asks here."""
