"""What happened in a run, for people: curves, tables and a page to read, all made from the run's folder."""
