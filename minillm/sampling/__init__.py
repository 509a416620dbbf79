"""From logits to the next token: parameters, filters, noise, the sampler, beam search. Built in chapter 01."""
