"""Does a KV connector do what it promises? Every format, kind of layer and axis order.

    pytest --pyargs vllm.testing.kv_connector --kv-connector my.module:MyConnector

The fake engine is the real one but for its model: a layer stores, for each token, bytes
that stand for the tokens up to it, and reads them all back in every step. So a byte
that a connector lost, moved or came too late with is seen, and told in words.
"""
