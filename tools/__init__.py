"""What the method stands on: flags, files, runs, memory. Its reader need not open these."""
