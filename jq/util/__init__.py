"""Files, progress on a terminal, the compilation cache and text that is safe in HTML."""
