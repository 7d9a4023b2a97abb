"""Where the gateway of `yardctl up` listens: where the settings say, not silently elsewhere."""

from pathlib import Path

import pytest

from controlplane.ctl.up import UpError, UpOptions, Yard, _listening_host, _specs
from controlplane.ctl.uplisten import gateway_host

YARD = Yard(
    yard_id="y",
    data=Path("/nowhere"),
    gateway_port=1,
    api_port=2,
    nats_port=3,
    monitoring_port=4,
    more_gateway_ports=(5,),
)


@pytest.mark.parametrize(
    ("listen", "host"),
    [
        ("127.0.0.1:8080", "127.0.0.1"),
        ("localhost:1", "127.0.0.1"),
        ("0.0.0.0:8080", "0.0.0.0"),
        (":8080", "0.0.0.0"),
    ],
)
def test_this_machine_alone_or_every_address(listen: str, host: str) -> None:
    assert gateway_host(listen) == host


@pytest.mark.parametrize("listen", ["10.0.0.7:8080", "[::]:8080", "gw.example:8080"])
def test_another_address_is_refused_with_what_serves_there(listen: str, tmp_path: Path) -> None:
    config = tmp_path / "yard.yaml"
    config.write_text(f"gateway: {{listen: '{listen}'}}\n")
    with pytest.raises(UpError, match=r"gateway\.listen: .*python -m gateway --listen"):
        _listening_host(config)


def test_the_gateways_listen_there_on_the_ports_that_were_chosen(tmp_path: Path) -> None:
    config = tmp_path / "yard.yaml"
    config.write_text("gateway: {listen: '0.0.0.0:9999'}\n")
    options = UpOptions(data=YARD.data, config=config, more_gateways=1)
    specs = _specs(YARD, options, Path("nats.conf"), listening_host=_listening_host(config))
    said = {
        name: spec.argv[list(spec.argv).index("--listen") + 1]
        for name, spec in specs.items()
        if "--listen" in spec.argv
    }
    assert said == {
        "gateway": "0.0.0.0:1",
        "gateway-2": "0.0.0.0:5",
        "controlplane": "127.0.0.1:2",
    }
