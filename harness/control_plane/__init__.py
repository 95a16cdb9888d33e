"""A real Kubernetes control plane for tests, started on loopback and gone with the process that started it.

kvplace's promises about binding, ledgers and admission are kept by rules that the API server and the
scheduler carry out. A fake would repeat our own understanding of those rules, so the tests ask the real
programs. They are built once from Go modules in this folder (`build`), started without containers
(`cluster`), and given nodes with a kubelet that `hollow_node` plays.
"""
