"""Config-driven training of language models over DeepSpeed. README.md says where to begin."""
