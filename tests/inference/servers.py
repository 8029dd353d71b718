"""What tests of the server share: a tokenizer, expected answers, and clients that leave."""

import json
import socket
import time
from contextlib import contextmanager
from functools import cache

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

SECONDS = 120
TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
HELLO = [{"role": "user", "content": "Hello"}]


def letters_tokenizer():
    """One token for each letter of ASCII, so that any tokens are a text."""
    vocabulary = {name: n for n, name in enumerate(["<pad>", "<bos>", "<eos>"])}
    vocabulary |= {chr(n): len(vocabulary) + n - 32 for n in range(32, 127)} | {"\n": 98}
    core = Tokenizer(models.WordLevel(vocab=vocabulary, unk_token="<pad>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    core.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<pad>", eos_token="<eos>", chat_template=TEMPLATE
    )


@cache
def load(checkpoint):
    model = AutoModelForCausalLM.from_pretrained(checkpoint).eval()
    return AutoTokenizer.from_pretrained(checkpoint), model


def expected(checkpoint, prompt, num):
    """The text that follows a prompt, or messages, greedily."""
    tokenizer, model = load(checkpoint)
    if not isinstance(prompt, str):
        prompt = tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
    inputs = tokenizer(prompt, return_tensors="pt")
    ids = model.generate(**inputs, max_new_tokens=num, do_sample=False)
    return tokenizer.decode(ids[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


@contextmanager
def asking(url, fields):
    """A client that has asked for a completion, and leaves at the end of the block."""
    host, port = url.removeprefix("http://").split(":")
    body = json.dumps(fields).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    head += f"Content-Length: {len(body)}\r\n\r\n"
    with socket.create_connection((host, int(port))) as client:
        client.sendall(head.encode() + body)
        yield


def until(holds):
    end = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < end, "it never came true"
        time.sleep(0.01)
