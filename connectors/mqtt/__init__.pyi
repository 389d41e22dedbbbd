from .link import LinkSettings as LinkSettings, MqttLink as MqttLink, Presence as Presence
from .source import (
    FLOODED as FLOODED,
    MqttSource as MqttSource,
    Router as Router,
    TopicRoute as TopicRoute,
    extra_route as extra_route,
    matcher as matcher,
    subscriptions as subscriptions,
)
