"""Workers on the nodes of a Ray cluster, behind the same channel.

::

    trainer                                            a node
    Supervisor ── RelayChannel ─┐                  ┌─ ProcessChannel ── worker
    Supervisor ── RelayChannel ─┼─ Courier ══ Relay ┼─ ProcessChannel ── worker
    Supervisor ── RelayChannel ─┘    one call      └─ ProcessChannel ── worker
                                     a round

frames     what travels between a courier and its relay
relay      on the node: monitor, workers, and what was asked of them; knows nothing of Ray
courier    in the trainer: a thread that exchanges frames with one relay, and its end of each worker on that node
fleet      the relays of one vector env or list: where they are, and which take the place of lost ones
cluster    all that is asked of Ray
"""
