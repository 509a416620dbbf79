"""Plausible mistakes in the exercises of chapter 03 that no misconception of its checkers covers."""

from minillm.book.proofs import Mutant, edited

MUTANTS = {
    "cache_bytes": [
        edited(
            "lets a missing entry pass, but not a null one",
            'config.get("num_key_value_heads") or heads',
            'config.get("num_key_value_heads", heads)',
            "raised TypeError",
        ),
        edited(
            "takes a null head_dim for a number",
            'config.get("head_dim") or config["hidden_size"] // heads',
            'config.get("head_dim", config["hidden_size"] // heads)',
            "head_dim is null in this file",
        ),
        edited("a float", "return kept * 2", "return kept * 2.0", "a float, not an int"),
    ],
    "doubling_cache": [
        edited("doubles once", "        while capacity < end:", "        if capacity < end:", "more than one doubling"),
        edited(
            "returns what it stores in",
            "        self.length = end\n",
            "        self.length = end\n        return self.keys\n",
            "not None",
        ),
        edited(
            "grows and starts empty",
            "F.pad(self.keys, more), F.pad(self.values, more)",
            "torch.zeros_like(F.pad(self.keys, more)), torch.zeros_like(F.pad(self.values, more))",
            "keys[:, :",
        ),
        Mutant(
            "attends over the whole capacity",
            source="""
class DoublingCache:
    def __init__(self, num_kv_heads, head_dim, capacity):
        self.keys, self.values, self.length = torch.zeros(num_kv_heads, capacity, head_dim), torch.zeros(num_kv_heads, capacity, head_dim), 0

    def append(self, k, v):
        end, capacity = self.length + k.shape[0], self.keys.shape[1]
        while capacity < end:
            capacity *= 2
        for name, new in (("keys", k), ("values", v)):
            old = getattr(self, name)
            grown = old if capacity == old.shape[1] else F.pad(old, (0, 0, 0, capacity - old.shape[1]))
            grown[:, self.length:end] = new.transpose(0, 1)
            setattr(self, name, grown)
        self.length = end

    def attend(self, q):
        mask = torch.ones(q.shape[0], self.keys.shape[1], dtype=torch.bool).tril(self.length - q.shape[0])
        out = F.scaled_dot_product_attention(q.transpose(0, 1)[None], self.keys[None], self.values[None], attn_mask=mask, enable_gqa=True)
        return out[0].transpose(0, 1)
""",
            expect="slots that hold no valid position were read",
        ),
        edited(
            "a new tensor for every token",
            "        if capacity > self.keys.shape[1]:\n",
            "        self.keys, self.values = self.keys.clone(), self.values.clone()\n        if capacity > self.keys.shape[1]:\n",
            "although there was room",
        ),
    ],
    "ring_cache": [
        edited(
            "keeps the head of a long chunk",
            "        kept = new[-self.window:]\n        self.keys[kept % self.window], self.values[kept % self.window] = "
            "k[-self.window:], v[-self.window:]",
            "        kept = new[:self.window]\n        self.keys[kept % self.window], self.values[kept % self.window] = "
            "k[:self.window], v[:self.window]",
            "the key and value in each slot",
        ),
        Mutant(
            "reads slots that are empty yet",
            source="""
class RingCache:
    def __init__(self, window, num_kv_heads, head_dim):
        self.keys, self.values = torch.zeros(window, num_kv_heads, head_dim), torch.zeros(window, num_kv_heads, head_dim)
        self.window, self.length, self.held = window, 0, [-1] * window

    def positions(self):
        return self.held

    def step(self, q, k, v):
        outs = []
        for i in range(len(k)):
            slot = self.length % self.window
            self.keys[slot], self.values[slot], self.held[slot] = k[i], v[i], self.length
            self.length += 1
            outs.append(masked_attention(q[i:i + 1], self.keys, self.values, torch.ones(1, self.window, dtype=torch.bool)))
        return torch.cat(outs)
""",
            expect="ring_cache: e",
        ),
        edited(
            "writes the whole chunk through one index",
            "        kept = new[-self.window:]\n        self.keys[kept % self.window], self.values[kept % self.window] = "
            "k[-self.window:], v[-self.window:]",
            "        self.keys[new % self.window], self.values[new % self.window] = k, v",
            "two tokens into one slot",
        ),
        edited(
            "one window for the whole chunk",
            "torch.arange(max(0, self.length - self.window), self.length)",
            "torch.arange(min(self.length, max(0, self.length + len(k) - self.window)), self.length)",
            "gather window - 1 positions before the chunk",
        ),
        edited(
            "a tensor of positions",
            "        return held\n",
            "        return torch.tensor(held)\n",
            "an int64 tensor, not a list",
        ),
        edited(
            "a list of tensors",
            "        return held\n",
            "        return list(torch.tensor(held))\n",
            "an int64 tensor, not an int",
        ),
        edited("forgets a method", "def step(", "def steps(", "RingCache has no 'step'"),
    ],
    "repair_positions": [
        edited(
            "never counts what it chose",
            "        ids.append(int(logits.argmax()))\n        if ids[-1] == eos_id:\n            break\n",
            "",
            "the loop does not end",
        ),
        edited(
            "tensors for token ids",
            "ids.append(int(logits.argmax()))",
            "ids.append(logits.argmax())",
            "an int64 tensor, not an int",
        ),
    ],
    "rewindable_ring": [
        edited(
            "forgets how far it had been",
            "self.high = max(self.high, self.length)",
            "self.high = self.length",
            "largest length so far",
        ),
        edited(
            "checks each rewind alone",
            "self.length - k < max(0, self.high - self.slack)",
            "k > min(self.slack, self.length)",
            "largest length so far",
        ),
        edited(
            "takes back more than there is",
            "self.length - k < max(0, self.high - self.slack)",
            "self.length - k < self.high - self.slack",
            "no more can be taken back than there is",
        ),
        edited(
            "no slack in the storage",
            "        slots = self.window + self.slack\n",
            "        slots = self.window\n",
            "the output [query, head, dimension]",
        ),
        edited(
            "takes the slack for part of the window",
            "(distance < self.window)",
            "(distance < slots)",
            "rewindable_ring",
        ),
        Mutant(
            "shrinks before it refuses",
            source="""
class RewindableRing:
    def __init__(self, window, slack, num_kv_heads, head_dim):
        self.keys, self.values = torch.zeros(window + slack, num_kv_heads, head_dim), torch.zeros(window + slack, num_kv_heads, head_dim)
        self.window, self.slack, self.length, self.high = window, slack, 0, 0

    def step(self, q, k, v):
        slots, old = self.window + self.slack, torch.arange(max(0, self.length - self.window + 1), self.length)
        new = torch.arange(self.length, self.length + k.shape[0])
        distance = new[:, None] - torch.cat([old, new])
        out = masked_attention(q, torch.cat([self.keys[old % slots], k]), torch.cat([self.values[old % slots], v]), (distance >= 0) & (distance < self.window))
        self.keys[new[-slots:] % slots], self.values[new[-slots:] % slots] = k[-slots:], v[-slots:]
        self.length += k.shape[0]
        self.high = max(self.high, self.length)
        return out

    def rewind(self, k):
        self.length -= k
        if k < 0 or self.length < max(0, self.high - self.slack):
            raise ValueError("too far")
""",
            expect="length after the refused",
        ),
        edited("refuses to take back nothing", "if k < 0 or", "if k <= 0 or", "0 positions can be taken back"),
        edited(
            "writes the whole chunk through one index",
            "        kept = new[-slots:]\n        self.keys[kept % slots], self.values[kept % slots] = k[-slots:], v[-slots:]\n",
            "        self.keys[new % slots], self.values[new % slots] = k, v\n",
            "two tokens into one slot",
        ),
    ],
}
