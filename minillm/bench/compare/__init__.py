"""`minillm bench compare`: the engine beside `transformers`, llama.cpp and vLLM, on the same weights and requests.
Built in chapter 14."""
