"""The model's tokenizer as schedulers get it."""

from functools import lru_cache

from paceline.plan import hashes
from paceline.plan.codec.tokenizers import write_content
from paceline.plan.codec.welcomes import write_defaults
from paceline.v1 import executor_pb2
from paceline_executor.weights.tokenizer import TokenizerBundle


def tokenizer_content(bundle: TokenizerBundle) -> bytes:
    """Return all of it as one message."""
    return write_content(
        executor_pb2.GetTokenizerResponse(
            tokenizer_json=bundle.tokenizer_json,
            chat_template=bundle.chat_template,
            bos_token_id=bundle.bos_token_id,
            eos_token_id=bundle.eos_token_id,
            end_token_ids=bundle.end_token_ids,
            add_bos=bundle.prefix_token_ids == (bundle.bos_token_id,),
            prefix_token_ids=bundle.prefix_token_ids,
            suffix_token_ids=bundle.suffix_token_ids,
            special_tokens=dict(bundle.special_tokens),
            default_sampling=write_defaults(bundle.defaults),
            default_system_text=bundle.default_system_text,
            response_template=bundle.response_template,
            tool_use_template=bundle.tool_use_template,
        )
    )


@lru_cache(maxsize=4)
def tokenizer_digest(bundle: TokenizerBundle) -> str:
    """Return what an executor announces."""
    return hashes.tokenizer_digest(tokenizer_content(bundle))
