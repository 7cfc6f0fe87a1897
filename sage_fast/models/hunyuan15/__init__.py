"""HunyuanVideo 1.5 over diffusers: forward, blocks, conditioning, text, decode."""
