"""What a person looks at after a run: the page, its charts, comparisons of scores and of videos."""
