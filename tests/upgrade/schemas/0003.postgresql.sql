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
	soak_until TIMESTAMP WITH TIME ZONE,
	undo JSON,
	CONSTRAINT decisions_pkey PRIMARY KEY (id),
	CONSTRAINT decisions_key_key UNIQUE (key)
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
	holdout JSON,
	measured DOUBLE PRECISION,
	measured_low DOUBLE PRECISION,
	measured_high DOUBLE PRECISION,
	CONSTRAINT ledger_pkey PRIMARY KEY (hour, store, namespace, tier)
);
CREATE TABLE prospects (
	id BIGSERIAL NOT NULL,
	namespace VARCHAR(255) NOT NULL,
	start TIMESTAMP WITH TIME ZONE NOT NULL,
	seconds DOUBLE PRECISION NOT NULL,
	requests BIGINT NOT NULL,
	costs JSON NOT NULL,
	CONSTRAINT prospects_pkey PRIMARY KEY (id)
);
CREATE TABLE reviews (
	id BIGSERIAL NOT NULL,
	decision BIGINT NOT NULL,
	at TIMESTAMP WITH TIME ZONE NOT NULL,
	stands VARCHAR(255) NOT NULL,
	reason TEXT NOT NULL,
	evidence JSON NOT NULL,
	CONSTRAINT reviews_pkey PRIMARY KEY (id)
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
	expected JSON,
	expected_at TIMESTAMP WITH TIME ZONE,
	differs_since TIMESTAMP WITH TIME ZONE,
	CONSTRAINT stores_pkey PRIMARY KEY (name)
);
CREATE INDEX prospects_by_start ON prospects (namespace, start);
CREATE INDEX reviews_by_decision ON reviews (decision, at);
INSERT INTO alembic_version VALUES ('0003');
