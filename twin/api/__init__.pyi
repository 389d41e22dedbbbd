from .client import ApiRefused as ApiRefused, Client as Client, connect as connect, path_of as path_of
from .runtime import JournalLine as JournalLine, Part as Part, Runtime as Runtime
from .service import (
    ApiServer as ApiServer,
    login_link as login_link,
    open_tokens as open_tokens,
    server_tls as server_tls,
)
from .tokens import Token as Token
