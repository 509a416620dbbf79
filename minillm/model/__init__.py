"""The decoder: one for Llama, Mistral, Qwen and the families beside them. Built in chapter 02."""
