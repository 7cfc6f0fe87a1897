"""HunyuanVideo 1.5 over diffusers: forward, blocks, attention, conditioning, text, LoRA, decode."""
