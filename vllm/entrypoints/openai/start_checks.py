"""Options of the server that are refused before an engine is started.

Knows files and JSON of options. Refuses to know engines and requests.
"""

import argparse
import ssl

from vllm.utils.argparse_utils import json_value


def text_list(given: str) -> list[str]:
    """What argparse takes for a JSON list of texts."""
    found = json_value(given)
    if not isinstance(found, list) or not all(isinstance(v, str) for v in found):
        raise argparse.ArgumentTypeError(
            f'{given!r}: expected a JSON list of texts, for example ["*"]'
        )
    return found


def check_tls(keyfile: str | None, certfile: str | None, ca_certs: str | None) -> None:
    """Raises ValueError, naming the option, for files that TLS cannot use."""
    if not keyfile and not certfile:
        return
    if not certfile:
        raise ValueError(
            f"--ssl-keyfile {keyfile!r} has no certificate: give --ssl-certfile too"
        )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(certfile, keyfile)
    except OSError as error:
        raise ValueError(
            f"--ssl-certfile {certfile!r} and --ssl-keyfile {keyfile!r} cannot be used "
            f"({error}): expected PEM files of a certificate and of its key"
        ) from error
    if not ca_certs:
        return
    try:
        context.load_verify_locations(ca_certs)
    except OSError as error:
        raise ValueError(
            f"--ssl-ca-certs {ca_certs!r} cannot be used ({error}): expected a PEM "
            "file of certificates"
        ) from error
