"""The conformance suite of compressors."""

import pytest

from dlio.exchange.compress import NAMES, Compressor, make_compressor
from dlio.exchange.compress.message_layout import ChunkScratch, pieces_of
from dlio.testing import CompressorTests
from dlio.testing.compressor import Layout


class _Named(CompressorTests):
    name = ""

    def make(self, layout: Layout) -> Compressor:
        return make_compressor(self.name, pieces_of(layout), ChunkScratch())


class TestOneBit(_Named):
    name = "onebit"
    lossless_feedback = False


class TestTernary(_Named):
    name = "ternary"


class TestThreshold(_Named):
    name = "threshold"


class TestAdaptive(_Named):
    name = "adaptive"


class TestInt8(_Named):
    name = "int8"


class TestBfloat16(_Named):
    name = "bf16"


class TestFloat16(_Named):
    name = "fp16"


@pytest.mark.parametrize("name", NAMES)
def test_each_compressor_is_tested(name: str) -> None:
    assert name in {suite.name for suite in _Named.__subclasses__()}
