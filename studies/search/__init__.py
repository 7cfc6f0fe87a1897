"""How the demo's settings were chosen, and what they gain on prompts that chose nothing."""
