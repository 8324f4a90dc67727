"""One-process float64 references, written from the formulas; they import nothing of the package."""
