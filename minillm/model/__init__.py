"""The decoder: one for Llama, Mistral, Qwen2 and Qwen3. Built in chapter 02."""
