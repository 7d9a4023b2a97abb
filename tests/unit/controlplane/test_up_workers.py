"""What `yardctl up --workers` hands to the gateway."""

from pathlib import Path

import pytest

from controlplane.ctl.up import UpOptions, Yard, _specs

YARD = Yard(
    yard_id="y",
    data=Path("/nowhere"),
    gateway_port=1,
    api_port=2,
    nats_port=3,
    monitoring_port=4,
    more_gateway_ports=(5,),
)


@pytest.mark.parametrize(("workers", "given"), [(None, None), (1, "1"), (4, "4")])
def test_the_number_of_workers_goes_to_the_gateway_and_only_when_it_was_said(
    workers: int | None, given: str | None
) -> None:
    options = UpOptions(data=YARD.data, workers=workers, more_gateways=1)
    specs = _specs(YARD, options, Path("nats.conf"))
    argv = list(specs["gateway"].argv)
    found = argv[argv.index("--workers") + 1] if "--workers" in argv else None
    assert found == given
    assert all("--workers" not in s.argv for name, s in specs.items() if name != "gateway")
