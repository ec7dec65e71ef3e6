"""Processes of ``mpirun`` or ``mpiexec`` in the variables of torchrun, which torch reads."""

from collections.abc import Mapping

# Rank, size, rank on its host and processes there: of Open MPI; of PMI, which MPICH and Intel MPI set.
_NAMES = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
)
_OURS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
_ADDRESS = ("MASTER_ADDR", "MASTER_PORT")


def mpi_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """``RANK``, ``WORLD_SIZE`` and so on of this process; empty unless one of several that MPI started.

    Also empty where ``RANK`` or ``WORLD_SIZE`` is set: by torchrun, or by a user whose processes train separately.
    The address where they meet, ``MASTER_ADDR`` and ``MASTER_PORT``, is not known to MPI.

    >>> mpi_variables({"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1"})
    {'RANK': '1', 'WORLD_SIZE': '2', 'LOCAL_RANK': '1'}
    """
    if "RANK" in environment or "WORLD_SIZE" in environment:
        return {}
    for names in _NAMES:
        rank, size = (environment.get(name, "") for name in names[:2])
        if rank.isdecimal() and size.isdecimal() and int(size) > 1:
            found = {ours: environment[name] for ours, name in zip(_OURS, names, strict=True) if name in environment}
            return {ours: environment.get(ours, value) for ours, value in found.items()}
    return {}


def missing_address(environment: Mapping[str, str]) -> str | None:
    """What several processes lack to meet, and how to start them; None: nothing."""
    needed: tuple[str, ...] = _ADDRESS if any(names[0] in environment for names in _NAMES) else ()
    if needed and "LOCAL_RANK" not in environment:
        needed = (*needed, "LOCAL_RANK")  # which GPU is whose
    missing = [name for name in needed if name not in environment]
    if not missing:
        return None
    number = environment.get("WORLD_SIZE")
    local = " LOCAL_RANK is the number of a process on its host." if "LOCAL_RANK" in missing else ""
    return (
        f"This is one of {number} processes of mpirun, and {', '.join(missing)} {'are' if missing[1:] else 'is'} not"
        " set: they need the address of the first host and a free port to meet. Start them with"
        f" `mpirun -n {number} -x MASTER_ADDR=HOST -x MASTER_PORT=29500 COMMAND` (Open MPI), `mpiexec -n {number} -genv"
        " MASTER_ADDR HOST -genv MASTER_PORT 29500 COMMAND` (MPICH, Intel MPI), or, without MPI, `trainwright launch"
        f" -n {number} SCRIPT` or torchrun.{local} With WORLD_SIZE=1 each process is a run of its own."
    )
