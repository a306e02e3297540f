"""One speed-up per file. A rung knows facts and records, never a sibling, never Lightning."""
