"""Reports: a run's JSON results in, one HTML page and a terminal table out. No model is touched here."""
