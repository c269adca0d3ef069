"""What a server is started with: defaults < holdfast.toml < environment (HOLDFAST_*) < arguments.

Everything is read and checked once, in `load_settings`; whoever gets a `Settings` need not check again. Each value
remembers where it came from. A secret comes from the environment alone, and neither it nor a password in a URL is
ever shown.
"""

from holdfast.settings.sources import FILE_NAME, PREFIX, check_serving, load_settings
from holdfast.settings.values import (
    DEFAULT_LISTEN,
    DEFAULT_URL,
    Explained,
    ListenAddress,
    RecoverSettings,
    Secret,
    Settings,
    StorageSettings,
    explain,
    masked,
    parse_address,
)

__all__ = [
    "DEFAULT_LISTEN",
    "DEFAULT_URL",
    "FILE_NAME",
    "PREFIX",
    "Explained",
    "ListenAddress",
    "RecoverSettings",
    "Secret",
    "Settings",
    "StorageSettings",
    "check_serving",
    "explain",
    "load_settings",
    "masked",
    "parse_address",
]
