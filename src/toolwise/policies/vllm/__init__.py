"""A vLLM server as the policy's engine: completions over token ids, and the learner's weights sent after an update."""
