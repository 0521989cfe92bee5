"""Is the final answer the label? Reading it out of a response, and comparing as text, by structure and by value."""
