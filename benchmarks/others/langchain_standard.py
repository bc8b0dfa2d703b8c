"""LangChain's standard tests of a chat model against the server of SERVER_URL: three clients on three protocols.

Run by `benchmarks.others` with the pytest of LangChain's own environment; it is no test of ours.
"""

import os
from typing import Any

from langchain_anthropic import ChatAnthropic
from langchain_openai import ChatOpenAI
from langchain_tests.integration_tests import ChatModelIntegrationTests

MODEL, ROOT = os.environ["SERVER_MODEL"], os.environ["SERVER_URL"]


class Standard(ChatModelIntegrationTests):
    """What all three have in common: no images, no rate limiter, short replies."""

    __test__ = False

    @property
    def supports_anthropic_inputs(self) -> bool:
        return False

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"model": MODEL, "api_key": os.environ["SERVER_KEY"], "max_tokens": 300, "max_retries": 0, "timeout": 60}


class TestChat(Standard):
    __test__ = True

    @property
    def chat_model_class(self) -> type[ChatOpenAI]:
        return ChatOpenAI

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {**super().chat_model_params, "base_url": f"{ROOT}/v1", "stream_usage": True}


class TestResponses(TestChat):
    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {**super().chat_model_params, "use_responses_api": True}


class TestMessages(Standard):
    __test__ = True

    @property
    def chat_model_class(self) -> type[ChatAnthropic]:
        return ChatAnthropic

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {**super().chat_model_params, "base_url": ROOT}
