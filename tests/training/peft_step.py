"""A training step of a LoRA adapter by torch and peft: python peft_step.py BASE ADAPTER TOKENS.npy OUT.safetensors LR

Writes the logits of the first sequence, the mean loss, the gradient of every factor, and the factors after one AdamW
step. Run by test_lora.py in an interpreter that has torch, transformers and peft.
"""

import sys

import numpy as np
import torch
from peft import PeftModel
from safetensors.numpy import save_file
from transformers import AutoModelForCausalLM


def main(base: str, adapter: str, tokens: str, out: str, lr: str) -> None:
    ids = torch.from_numpy(np.load(tokens))
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, attn_implementation="eager")
    model = PeftModel.from_pretrained(model, adapter, is_trainable=True)
    model.eval()  # no dropout
    logits = model(input_ids=ids).logits
    loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    loss.backward()
    factors = {name.replace(".default.", "."): each for name, each in model.named_parameters() if each.requires_grad}
    arrays = {f"grad.{name}": each.grad.numpy().copy() for name, each in factors.items()}
    torch.optim.AdamW(factors.values(), lr=float(lr), betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1).step()
    arrays |= {f"master.{name}": each.detach().numpy().copy() for name, each in factors.items()}
    arrays |= {"logits": logits[0].detach().numpy().copy(), "loss": loss.detach().numpy().reshape(1).copy()}
    save_file(arrays, out)


if __name__ == "__main__":
    main(*sys.argv[1:])
