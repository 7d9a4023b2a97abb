"""A self-signed certificate for 127.0.0.1 and localhost with its key, for tests of TLS alone; valid for a century."""

import ssl
from pathlib import Path

KEY = """\
-----BEGIN PRIVATE KEY-----
MIGHAgEAMBMGByqGSM49AgEGCCqGSM49AwEHBG0wawIBAQQgtsyxZnH1dJwz8FDR
HTDOaR/arXeWcQG4GGlp5/98esShRANCAAThZPGVT9TKLmah57NcQEo4xxf/UyP4
jIGJORNhvmvnwQFE4KbCAy5Q60WwNk10Uva7nw5usSadwAuBF6qpj70G
-----END PRIVATE KEY-----
"""

CERTIFICATE = """\
-----BEGIN CERTIFICATE-----
MIIBpDCCAUugAwIBAgIUV5gatw+Z2oo5ju3kz9EkUzk5Ab4wCgYIKoZIzj0EAwIw
GTEXMBUGA1UEAwwObW9kZWx5YXJkIHRlc3QwIBcNMjYxMTI5MjAyODM5WhgPMjEy
NjExMDUyMDI4MzlaMBkxFzAVBgNVBAMMDm1vZGVseWFyZCB0ZXN0MFkwEwYHKoZI
zj0CAQYIKoZIzj0DAQcDQgAE4WTxlU/Uyi5moeezXEBKOMcX/1Mj+IyBiTkTYb5r
58EBROCmwgMuUOtFsDZNdFL2u58ObrEmncALgReqqY+9BqNvMG0wHQYDVR0OBBYE
FNTdMRRGbol40RGGn4z7iBwnsBoPMB8GA1UdIwQYMBaAFNTdMRRGbol40RGGn4z7
iBwnsBoPMBoGA1UdEQQTMBGCCWxvY2FsaG9zdIcEfwAAATAPBgNVHRMBAf8EBTAD
AQH/MAoGCCqGSM49BAMCA0cAMEQCIH0WnGT+Qh3IKZSgb0z4gbJ86Y9oO/MkUCOM
DACMA7y1AiB18JoVVlngkvmwI0JNkfO94VdY40+4CrW0JSfJGZcMvg==
-----END CERTIFICATE-----
"""


def server_context(folder: Path) -> tuple[ssl.SSLContext, Path]:
    """A context to serve with, and the file a client has to trust."""
    key, certificate = folder / "test.key", folder / "test.crt"
    key.write_text(KEY)
    certificate.write_text(CERTIFICATE)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    return context, certificate
