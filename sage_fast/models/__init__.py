"""Video models: the interface, the search for a specification, the check and the loading of
weights, attention, LoRA and checkpointing that families share, and a folder for each family."""
