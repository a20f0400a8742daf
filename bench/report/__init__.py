"""What a run found: records, tables, plots and targets."""
