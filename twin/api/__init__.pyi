from .client import Client as Client, connect as connect, path_of as path_of
from .forecast_texts import Shown as Shown, shown as shown, span as span, why as why
from .rma_markdown import markdown as markdown
from .runtime import JournalLine as JournalLine, Part as Part, Runtime as Runtime
from .service import ApiServer as ApiServer, open_tokens as open_tokens, server_tls as server_tls
from .tokens import Token as Token
