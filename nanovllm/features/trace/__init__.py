"""Write down what an engine does, so that one can watch it afterwards: `LLM(..., trace=path)`."""
