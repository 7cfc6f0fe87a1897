"""Video models: what every one of them shares, and a folder for each."""
