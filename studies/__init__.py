"""Studies on the testbed: claims of the SAGE-GRPO paper (`paper`), and recipes at equal compute
(`race`)."""
