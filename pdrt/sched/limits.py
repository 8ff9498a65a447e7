"""What a scheduler is allowed: sizes and policies from the configuration, as plain values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pdrt.data.layout import blocks_for
from pdrt.errors import BadRequest, TooLong
from pdrt.sched.request import Request


@dataclass(frozen=True, slots=True)
class Limits:
    block_size: int = 16
    max_batch_size: int = 64  # requests in one step
    max_prefill_tokens: int = 512  # prompt tokens in one step
    reserved_tokens: int = 64  # kept free for each request that is admitted (R); at first
    adaptive_reserve: bool = False  # R follows what answers really use
    max_waiting: int = 1024  # beyond: Overloaded
    retraction: Literal["copy", "reprefill", "local"] = "reprefill"
    host_blocks: int = 0  # for copies of retracted requests' KV
    chunked: bool = True  # prefill: blocks leave while the next chunk computes
    rebind_grace_s: float = 1.0  # decode: how long a lost prefill may be replaced
    local_prefill: bool = False  # decode: a prompt may be computed here from its beginning
    early_first_token: bool = True  # decode: it is said before its KV is here
    prefix_cache: bool = True  # what is computed once is not computed, or received, again
    patience: int = 8  # how often a request is overtaken before it is waited for
    lookahead: int = 64  # of those that wait, so many that do not fit are looked at in a step
    vocab: int = 0  # tokens that the model knows; 0: not known
    is_blind: bool = False  # nobody reads tokens (the simulator): see `steady`

    @property
    def max_held(self) -> int:
        """Requests that may hold memory: a batch that runs, and one that arrives meanwhile."""
        return 2 * self.max_batch_size

    def is_known(self, token: int) -> bool:
        """Whether the model may be given it: another id is a place outside its embedding."""
        return token >= 0 and (not self.vocab or token < self.vocab)

    def check_fits(self, request: Request, tokens: int, blocks: int) -> None:
        """Raises TooLong when `tokens` can never be held, BadRequest for none or unknown ones."""
        if not request.tokens:
            raise BadRequest("prompt: it is empty")
        ends = () if self.is_blind else (min(request.tokens), max(request.tokens))
        for token in ends:
            if not self.is_known(token):
                raise BadRequest(f"prompt: token {token} is outside the vocabulary of {self.vocab}")
        for token, _bias in request.sampling.logit_bias:
            if not self.is_known(token):
                raise BadRequest(f"logit_bias: token {token} is outside the vocabulary")
        needed = blocks_for(tokens, self.block_size)
        if needed > blocks:
            raise TooLong(
                f"{tokens} tokens (prompt {request.prompt_tokens}, max_tokens "
                f"{request.sampling.max_tokens}) need {needed} KV blocks of {self.block_size};"
                f" there are {blocks}"
            )
