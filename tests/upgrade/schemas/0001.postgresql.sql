CREATE TABLE alembic_version (
	version_num VARCHAR(32) NOT NULL,
	CONSTRAINT alembic_version_pkc PRIMARY KEY (version_num)
);
CREATE TABLE answers (
	tuner VARCHAR(255) NOT NULL,
	store VARCHAR(255) NOT NULL,
	tier VARCHAR(255) NOT NULL,
	namespace VARCHAR(255) NOT NULL,
	at TIMESTAMP WITH TIME ZONE NOT NULL,
	change BOOLEAN NOT NULL,
	reason TEXT NOT NULL,
	CONSTRAINT answers_pkey PRIMARY KEY (tuner, store, tier, namespace)
);
CREATE TABLE audit (
	id BIGSERIAL NOT NULL,
	at TIMESTAMP WITH TIME ZONE NOT NULL,
	who VARCHAR(255) NOT NULL,
	source VARCHAR(255) NOT NULL,
	what VARCHAR(255) NOT NULL,
	detail JSON NOT NULL,
	CONSTRAINT audit_pkey PRIMARY KEY (id)
);
CREATE TABLE decisions (
	id BIGSERIAL NOT NULL,
	key VARCHAR(255) NOT NULL,
	tuner VARCHAR(255) NOT NULL,
	store VARCHAR(255) NOT NULL,
	tier VARCHAR(255) NOT NULL,
	namespace VARCHAR(255) NOT NULL,
	target VARCHAR(255) NOT NULL,
	models JSON NOT NULL,
	field VARCHAR(255) NOT NULL,
	"from" JSON NOT NULL,
	"to" JSON NOT NULL,
	mode VARCHAR(255) NOT NULL,
	state VARCHAR(255) NOT NULL,
	reason TEXT NOT NULL,
	evidence JSON NOT NULL,
	expected_version BIGINT,
	applied_version BIGINT,
	policy_revision BIGINT,
	created_at TIMESTAMP WITH TIME ZONE NOT NULL,
	updated_at TIMESTAMP WITH TIME ZONE NOT NULL,
	approved_at TIMESTAMP WITH TIME ZONE,
	approved_by VARCHAR(255) NOT NULL,
	applied_at TIMESTAMP WITH TIME ZONE,
	CONSTRAINT decisions_pkey PRIMARY KEY (id),
	CONSTRAINT decisions_key_key UNIQUE (key)
);
CREATE TABLE freezes (
	id BIGSERIAL NOT NULL,
	reason TEXT NOT NULL,
	who VARCHAR(255) NOT NULL,
	start TIMESTAMP WITH TIME ZONE NOT NULL,
	until TIMESTAMP WITH TIME ZONE,
	lifted_at TIMESTAMP WITH TIME ZONE,
	CONSTRAINT freezes_pkey PRIMARY KEY (id)
);
CREATE TABLE incidents (
	id BIGSERIAL NOT NULL,
	kind VARCHAR(255) NOT NULL,
	store VARCHAR(255) NOT NULL,
	message TEXT NOT NULL,
	opened_at TIMESTAMP WITH TIME ZONE NOT NULL,
	last_seen TIMESTAMP WITH TIME ZONE NOT NULL,
	closed_at TIMESTAMP WITH TIME ZONE,
	CONSTRAINT incidents_pkey PRIMARY KEY (id)
);
CREATE TABLE ledger (
	hour TIMESTAMP WITH TIME ZONE NOT NULL,
	store VARCHAR(255) NOT NULL,
	namespace VARCHAR(255) NOT NULL,
	tier VARCHAR(255) NOT NULL,
	seconds DOUBLE PRECISION NOT NULL,
	saved DOUBLE PRECISION NOT NULL,
	lost DOUBLE PRECISION NOT NULL,
	bytes BIGINT NOT NULL,
	transferred BIGINT NOT NULL,
	money DOUBLE PRECISION NOT NULL,
	CONSTRAINT ledger_pkey PRIMARY KEY (hour, store, namespace, tier)
);
CREATE TABLE policy_revisions (
	id BIGSERIAL NOT NULL,
	digest VARCHAR(255) NOT NULL,
	source TEXT NOT NULL,
	text TEXT NOT NULL,
	loaded_at TIMESTAMP WITH TIME ZONE NOT NULL,
	CONSTRAINT policy_revisions_pkey PRIMARY KEY (id)
);
CREATE TABLE stage_windows (
	id BIGSERIAL NOT NULL,
	store VARCHAR(255) NOT NULL,
	stage VARCHAR(255) NOT NULL,
	phase VARCHAR(255) NOT NULL,
	gpu VARCHAR(255) NOT NULL,
	start TIMESTAMP WITH TIME ZONE NOT NULL,
	seconds DOUBLE PRECISION NOT NULL,
	gpu_seconds DOUBLE PRECISION NOT NULL,
	tokens DOUBLE PRECISION NOT NULL,
	CONSTRAINT stage_windows_pkey PRIMARY KEY (id)
);
CREATE TABLE stores (
	name VARCHAR(255) NOT NULL,
	url VARCHAR(255) NOT NULL,
	boot_id VARCHAR(255) NOT NULL,
	version VARCHAR(255) NOT NULL,
	first_seen TIMESTAMP WITH TIME ZONE NOT NULL,
	last_seen TIMESTAMP WITH TIME ZONE NOT NULL,
	status JSON NOT NULL,
	tuning JSON NOT NULL,
	totals JSON NOT NULL,
	pending_bypass BOOLEAN,
	CONSTRAINT stores_pkey PRIMARY KEY (name)
);
CREATE TABLE verdicts (
	id BIGSERIAL NOT NULL,
	decision BIGINT NOT NULL,
	at TIMESTAMP WITH TIME ZONE NOT NULL,
	verdict VARCHAR(255) NOT NULL,
	reason TEXT NOT NULL,
	evidence JSON NOT NULL,
	CONSTRAINT verdicts_pkey PRIMARY KEY (id)
);
CREATE TABLE windows (
	id BIGSERIAL NOT NULL,
	store VARCHAR(255) NOT NULL,
	namespace VARCHAR(255) NOT NULL,
	model VARCHAR(255) NOT NULL,
	tier VARCHAR(255) NOT NULL,
	start TIMESTAMP WITH TIME ZONE NOT NULL,
	seconds DOUBLE PRECISION NOT NULL,
	requests BIGINT NOT NULL,
	counters JSON NOT NULL,
	CONSTRAINT windows_pkey PRIMARY KEY (id)
);
CREATE INDEX decisions_by_target ON decisions (store, tier, namespace, tuner);
CREATE INDEX ix_decisions_state ON decisions (state);
CREATE INDEX incidents_open ON incidents (kind, store, closed_at);
CREATE INDEX stage_windows_by_start ON stage_windows (store, start);
CREATE INDEX ix_verdicts_decision ON verdicts (decision);
CREATE INDEX windows_by_start ON windows (start);
CREATE INDEX windows_by_tier ON windows (store, tier, namespace, start);
INSERT INTO alembic_version VALUES ('0001');
