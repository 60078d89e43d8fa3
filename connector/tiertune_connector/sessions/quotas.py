"""How much of DRAM each tenant holds, and whether it may hold more."""

from dataclasses import dataclass

from tiertune_connector.tuning import InForce


@dataclass(eq=False)
class Quotas:
    """Bytes by tenant; chunks without one are not counted. Guarded by the store's lock."""

    tuning: InForce
    """What is in force."""

    def __post_init__(self) -> None:
        self._held: dict[bytes, int] = {}

    def change(self, tenant: bytes, nbytes: int) -> None:
        """A tenant holds ``nbytes`` more, or less."""
        if tenant:
            held = self._held.pop(tenant, 0) + nbytes
            if held:
                self._held[tenant] = held

    def left(self, tenant: bytes) -> int | None:
        """Bytes that a tenant may still add; None: it has no quota."""
        quota = self.tuning().tenants.get(tenant.hex()) if tenant else None
        return None if quota is None else max(0, quota.quota_bytes - self._held.get(tenant, 0))

    def refuse(self, tenant: bytes, more: int) -> bool:
        """Whether ``more`` bytes would exceed the tenant's quota, if it has one."""
        left = self.left(tenant)
        return left is not None and more > left

    def document(self) -> dict[str, dict[str, int]]:
        """Quota and DRAM bytes held of each tenant that has a quota, by its digest."""
        held = {tenant.hex(): nbytes for tenant, nbytes in self._held.items()}
        return {
            digest: {"quota_bytes": tenant.quota_bytes, "resident_bytes": held.get(digest, 0)}
            for digest, tenant in self.tuning().tenants.items()
        }
