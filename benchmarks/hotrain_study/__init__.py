"""The studies of docs/results.md, which check what the papers claim: what is trained and measured, records, tables."""
