"""Models out of Hugging Face folders: config.json, safetensors, tokenizer.json."""
