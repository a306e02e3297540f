"""Plain Lightning code as a beginner writes it, with no speed code in it: the baselines that fastloop makes faster."""
