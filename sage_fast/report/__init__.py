"""Reports on runs: the page, its charts, and comparisons of scores and videos."""
