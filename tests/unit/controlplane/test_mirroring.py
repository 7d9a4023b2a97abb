"""Where a mirror says it is: where it listens, so that agents of other machines find it."""

import pytest

from controlplane.mirroring import announced


@pytest.mark.parametrize(
    ("listen", "url"),
    [
        ("127.0.0.1:8081", "http://127.0.0.1:9"),
        ("10.0.0.7:0", "http://10.0.0.7:9"),
        ("yard.example:8081", "http://yard.example:9"),
        ("[::1]:8081", "http://[::1]:9"),
    ],
)
def test_a_mirror_is_where_its_control_plane_listens(listen: str, url: str) -> None:
    assert announced(listen, 9) == url


@pytest.mark.parametrize("listen", ["0.0.0.0:8081", "[::]:8081", ":8081"])
def test_of_every_address_it_knows_its_own_alone_and_says_so(
    listen: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert announced(listen, 9) == "http://127.0.0.1:9"
    assert "mirror_url" in caplog.text
