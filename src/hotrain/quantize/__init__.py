"""Step 2, fewer bits: codes and a scale. Linear transforms live in `hotrain.transform`; what rounds lives here."""
