"""Documents that KubeVirt makes of VMs: `python -m tests.kubevirt_documents` makes them again.

They are kept in the project, so tests read them without KubeVirt's programs. A test with these programs fails
when KubeVirt makes other ones.

`domains/NAME.vmi.yaml` is a VMI as a user writes it, `NAME.vmi.json` the same VMI with KubeVirt's defaults as
virt-launcher gets it, and `NAME.domain.xml` the domain XML of the first call of OnDefineDomain. `pods/` has
the virt-launcher pods of the VMIs in `vmis_of_pods.yaml`, as the API server stores them.
"""

from pathlib import Path

DOMAINS = Path(__file__).parent / "domains"
PODS = Path(__file__).parent / "pods"
DOMAIN_FILES = tuple(sorted(DOMAINS.glob("*.domain.xml")))
POD_FILES = tuple(sorted(PODS.glob("*.pod.json")))
assert DOMAIN_FILES
assert POD_FILES
