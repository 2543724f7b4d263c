import pytest

from safeload.errors import ConfigError
from safeload.sizes import human_size, parse_size


@pytest.mark.parametrize(
    ("text", "n_bytes"),
    [
        ("1", 1),
        (4096, 4096),
        ("512B", 512),
        ("67,121,280", 67_121_280),
        ("1,000.5 kB", 1_000_500),
        ("500MB", 500_000_000),
        ("8GiB", 8 * 2**30),
        ("8 gib", 8 * 2**30),
        (" 1.5TiB ", 3 * 2**39),
        ("0.5kB", 500),
        ("2PiB", 2**51),
        (str(2**63 - 1), 2**63 - 1),
    ],
)
def test_a_size_is_a_number_and_a_unit(text: str | int, n_bytes: int) -> None:
    assert parse_size(text) == n_bytes


@pytest.mark.parametrize(
    "text",
    [
        "",
        "GiB",
        "8G",
        "-1",
        "0",
        "1e9",
        "0x10",
        "1,5GiB",
        "1000,000",
        "1,0000",
        ",100",
        "1.B",
        "1.5B",
        "nan",
        "8GiBs",
        "٣",
        str(2**63),
        "9PiB9",
        True,
    ],
)
def test_anything_else_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ConfigError, match="8GiB"):
        parse_size(text)


@pytest.mark.parametrize(
    ("n_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (2**20 - 1, "1.0 MiB"),
        (1536 * 2**20, "1.5 GiB"),
        (318_239_886_140, "296.4 GiB"),
        (2**50 * 2000, "2000.0 PiB"),
    ],
)
def test_a_size_is_shown_in_a_unit_that_keeps_it_short(n_bytes: int, text: str) -> None:
    assert human_size(n_bytes) == text
