"""A guided reading of vLLM and SGLang: the guide, and a stored index that each of its names is looked up in.
Built in chapter 25."""
