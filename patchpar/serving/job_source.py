"""What a job was made of, so that another server can go on with it."""

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass

from patchpar.serving.image_call import ImageCall
from patchpar.serving.job import Job, Journaled
from patchpar.serving.kept_jobs import KeptJob, KeptJobs, kind_of, new_id
from patchpar.serving.pipeline_fields import PipelineFields
from patchpar.serving.request_journal import JournaledRequest, RequestJournal
from patchpar.serving.unfinished_call import UnfinishedCall
from patchpar.serving.uploaded_image import Uploads

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSource:
    """What a job was made of. `route`: see `JournalEntry`. `owner`: who may see it.

    `is_lasting`: whether the next server goes on with it.
    """

    route: str
    request: PipelineFields
    uploads: Uploads
    owner: str
    call: ImageCall
    is_lasting: bool = True


def journaled(job: Job, source: JobSource, kept: KeptJob | None, model: str) -> JournaledRequest:
    """Return what the journal has of a job. `kept`: None for one whose client waits for it, which becomes one."""
    return JournaledRequest(
        id=new_id(kind_of(source.route)) if kept is None else kept.id,
        model=model,
        route=source.route,
        request=source.request.model_dump(mode="json", exclude_none=True),
        seed=source.call.seed,
        owner=source.owner,
        created_at=int(time.time()) if kept is None else kept.created_at,
        key="" if kept is None else kept.key,
        digest="" if kept is None else kept.digest.hex(),
        uploads=source.uploads,
        kept=UnfinishedCall() if job.kept is None else job.kept.snapshot(),
    )


def write_journal(journal: RequestJournal, jobs: Sequence[Job], kept: KeptJobs, model: str) -> None:
    """Write down jobs that have not ended, for the next server. Whoever waits for one is told its ID.

    One that cannot be written is lost, unless an earlier server has written it: the next one begins with that.
    """
    for job in jobs:
        if not isinstance(job.source, JobSource) or not job.source.is_lasting:
            continue
        known = kept.of(job)
        try:
            entry = journaled(job, job.source, known, model)
            journal.save(entry)
        except Exception:  # the others are written all the same
            log.exception("a request of %s could not be written to the journal", job.source.route)
            if known is not None and journal.holds(known.id):
                job.abandon(Journaled(known.id))
        else:
            job.abandon(Journaled(entry.id))
