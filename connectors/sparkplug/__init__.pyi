from .payload import rebirth as rebirth
from .source import SparkplugDecoder as SparkplugDecoder
