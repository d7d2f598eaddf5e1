"""A vLLM server as the policy's engine: completions over token ids, and weight transfer after each update."""
